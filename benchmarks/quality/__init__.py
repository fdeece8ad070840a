"""What a cold form costs a real model: paged attention emulated, rivals' formats, real text (the `fidelity` suite)."""
