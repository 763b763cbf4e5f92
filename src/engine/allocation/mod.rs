//! What a pod was promised: fit, in-place resize, and the checkpoint. Behaviour: spec 02a §8.
