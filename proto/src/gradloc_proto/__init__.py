"""Messages, streams, bus and the pure rules that every part of gradloc shares."""

__version__ = "0.1.0"
