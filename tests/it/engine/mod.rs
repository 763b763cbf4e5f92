//! End-to-end scenarios of the engine over the scripted runtime.

mod admission;
mod endings;
mod restarts;
mod shutdown;
mod starts;
mod steady;
mod upkeep;
