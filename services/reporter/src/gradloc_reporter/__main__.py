"""`python -m gradloc_reporter`: the same as `gradloc reporter`."""

from gradloc_reporter.command import reporter

if __name__ == "__main__":
    reporter(prog_name="gradloc-reporter")
