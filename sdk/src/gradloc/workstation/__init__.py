"""All services of gradloc on one machine: `gradloc up`, and the stage of the demo."""
