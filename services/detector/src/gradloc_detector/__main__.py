"""`python -m gradloc_detector`: the same as `gradloc detector`."""

from gradloc_detector.command import main

if __name__ == "__main__":
    main()
