"""What a cold form costs a real model: emulated paged attention, rivals' formats, real text. Used by the `fidelity` suite."""
