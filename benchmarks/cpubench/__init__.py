"""Parts of benchmarks.cpu: workloads, servers, the machine's own limits, and the report."""
