"""A router in front of several servers: it chooses one for each request and hides that they come and go."""
