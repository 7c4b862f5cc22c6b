"""Places that compute batches: this process, CPU workers, a GPU, or tasks for other machines."""
