"""`gradloc replay FILE`: the detector on a finished run, from whatever log is left of it.

Not to be confused with `gradloc.replay`, which recomputes one step's gradient from a snapshot.
"""
