//! Linux capabilities: drops capabilities of the calling thread.

use std::io;

use nix::libc;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set, remove_capability_from_bounding_set,
    set_capabilities,
};

/// Upper bound of capability numbers.
const CAPABILITIES: u32 = 64;

/// Drops all capabilities but `keep` (a bit mask) from the bounding set of this thread and of programs it executes.
///
/// # Errors
/// The kernel's error, with the capability number.
pub fn drop_bounding(keep: u64) -> io::Result<()> {
    for number in (0..CAPABILITIES).filter(|number| keep >> number & 1 == 0) {
        match remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << number)) {
            // The first number that the kernel does not know: it does not know later ones either.
            Err(error) if error.raw_os_error() == libc::EINVAL => break,
            Err(error) => return Err(io::Error::other(format!("drop capability {number}: {error}"))),
            Ok(()) => {}
        }
    }
    Ok(())
}

/// Keeps only these capabilities for this thread, and none for programs it executes.
///
/// # Errors
/// The kernel's error.
pub fn keep_only(wanted: CapabilitySet) -> io::Result<()> {
    drop_bounding(wanted.bits())?;
    clear_ambient_capability_set()?;
    let kept = capabilities(None)?.permitted & wanted;
    set_capabilities(None, CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() })?;
    Ok(())
}
