//! What the API sees: phase, conditions, container statuses (all pure), and the status manager.
