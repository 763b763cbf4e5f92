//! The engine as a whole, over the scripted runtime: one scenario each.

mod admission;
mod endings;
mod restarts;
mod shutdown;
mod starts;
mod steady;
mod upkeep;
