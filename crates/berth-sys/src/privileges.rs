//! Giving up what a process may do.

use std::io;

use nix::libc;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set, remove_capability_from_bounding_set,
    set_capabilities,
};

/// Number of capabilities there can be.
const CAPABILITIES: u32 = 64;

/// Takes from this thread what it, and what it executes, could ever have, except for `keep`: a bit for each capability.
///
/// # Errors
/// What the kernel says, with the number.
pub fn drop_bounding(keep: u64) -> io::Result<()> {
    for number in (0..CAPABILITIES).filter(|number| keep >> number & 1 == 0) {
        match remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << number)) {
            // The first number the kernel does not know: nor does it know those that follow.
            Err(error) if error.raw_os_error() == libc::EINVAL => break,
            Err(error) => return Err(io::Error::other(format!("drop capability {number}: {error}"))),
            Ok(()) => {}
        }
    }
    Ok(())
}

/// Leaves this thread only these of its capabilities, and nothing to what it executes.
///
/// # Errors
/// What the kernel says.
pub fn keep_only(wanted: CapabilitySet) -> io::Result<()> {
    drop_bounding(wanted.bits())?;
    clear_ambient_capability_set()?;
    let kept = capabilities(None)?.permitted & wanted;
    set_capabilities(None, CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() })?;
    Ok(())
}
