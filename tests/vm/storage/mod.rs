//! Network storage in a virtual machine with a real NFS server and client.
//!
//! This program boots it ([`boot`]) and, inside, runs the volume plugins ([`nfs`]).

mod boot;
mod nfs;
