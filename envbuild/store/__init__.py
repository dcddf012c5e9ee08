"""Content-addressed files that several builds share, the clients that fetch them, and the team's cache of them."""
