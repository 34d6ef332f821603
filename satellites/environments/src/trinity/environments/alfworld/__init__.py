"""ALFWorld (Shridhar et al. 2021, "ALFWorld: Aligning Text and Embodied Environments for Interactive Learning"): the
engine of its authors, on their games or on small ones made here."""
