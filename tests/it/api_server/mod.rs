//! The test API server itself: it has to be true before anybody trusts what it says about an agent. Spec 10a §I, §23.

mod client;
mod conduct;
mod faults;
mod parity;
mod rules_join;
mod second_door;
mod storage;
mod watches;
mod wire;
mod world;
