"""Keys of Trinity-RFT and veRL: what they mean here, and why some are refused."""
