"""What plugins written for Trinity-RFT import, mapped onto Trinity's own: see docs/from_trinity.md.

Names, arguments and results are those of Trinity-RFT. Nothing here is used by Trinity itself; plugins for Trinity use
trinity.plugins. Importing it loads no torch.
"""
