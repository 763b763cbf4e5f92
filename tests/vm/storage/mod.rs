//! Storage of a network as it really is: servers and clients of a kernel's own, in a virtual machine of the kit's.
//!
//! This program boots it ([`boot`]) and, within, asks the plugins for what pods want ([`nfs`]).

mod boot;
mod nfs;
