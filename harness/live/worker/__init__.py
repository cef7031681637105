"""A worker of a live job, and the job as each of its processes builds it."""
