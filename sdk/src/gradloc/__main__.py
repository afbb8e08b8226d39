"""Entry of the `gradloc` command."""

from gradloc.command import gradloc


def main() -> None:
    gradloc()


if __name__ == "__main__":
    main()
