"""What keeps the stages moving: coordinator, feed, followers, readiness, service."""
