"""All services on one machine, as processes: Redis, Ray with a spare pool, detector and reporter."""
