"""The processes of a run, and by which launcher they are started: local, Ray, Slurm, Kubernetes."""
