"""gradloc in trainers that people already have: no fork, no subclass. Each module names its trainer."""
