"""Many runs, one question: rules x traces x workloads x seeds, in parallel, resumable."""
