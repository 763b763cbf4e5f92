//! End-to-end scenarios of the engine over the scripted runtime.

mod admission;
mod concurrency;
mod restarts;
mod running_pods;
mod shutdown;
mod starts;
mod termination;
