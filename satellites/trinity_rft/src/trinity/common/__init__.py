"""Names that plugins of Trinity-RFT import, mapped onto Trinity's: see docs/from_trinity.md.

Names, arguments and results are Trinity-RFT's. The core uses nothing of it; plugins for Trinity import trinity.plugins.
Importing it loads no torch.
"""
