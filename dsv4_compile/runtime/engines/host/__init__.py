"""The engine for CPU inputs."""
