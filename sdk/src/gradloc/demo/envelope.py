"""What the demo hands to its trainer in a sealed envelope: which fault, and where to leave what the judge needs.

Names only; light enough for a command that does not load torch.
"""

FAULT_VARIABLE = "GRADLOC_DEMO_FAULT"
JUDGE_VARIABLE = "GRADLOC_DEMO_JUDGE"
FAULT_NAMES = ("token-mismatch", "layer", "none")
TRUTH = "truth.json"  # in the judge's folder: what the judge found
