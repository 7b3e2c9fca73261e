"""What a cluster tells by itself: watches of jobs, pods and events, shared by all who wait in one place."""
