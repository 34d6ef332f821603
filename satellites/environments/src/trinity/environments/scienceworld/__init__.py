"""ScienceWorld (Wang et al. 2022, "ScienceWorld: Is your Agent Smarter than a 5th Grader?"): the simulator of its
authors, on a Java machine with a limited heap."""
