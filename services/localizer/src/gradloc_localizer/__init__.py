"""The Ray job: replay, attribution, bisection, certificate, diagnosis."""
