//! Pty of a container, created from its own `devpts` so that its number is valid inside.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
};

use rustix::{
    fs::OFlags,
    pty::{OpenptFlags, ioctl_tiocgptpeer, unlockpt},
    termios::{Winsize, tcsetwinsize},
};

use super::error_context::{ErrorContext, Step, failure};
use berth_sys::in_root;

/// `f_type` of `devpts`.
const DEVPTS: rustix::fs::FsWord = 0x1cd1;

/// A pty.
pub(super) struct Terminal {
    /// Master, for the shim or the agent.
    pub(super) master: OwnedFd,
    /// Slave, for the process.
    pub(super) slave: OwnedFd,
}

/// Creates a pty from the `devpts` mounted inside a root, and sets its owner.
///
/// A program inside may have replaced the device: anything but a pty master is refused.
pub(super) fn make(root: BorrowedFd<'_>, size: (u16, u16), uid: u32) -> Step<Terminal> {
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::NONBLOCK;
    let master = in_root::open_with(root, Path::new("/dev/pts/ptmx"), flags)
        .or_else(|_| in_root::open_with(root, Path::new("/dev/ptmx"), flags))
        .context(|| "open /dev/pts/ptmx")?;
    if rustix::fs::fstatfs(&master).context(|| "stat /dev/pts/ptmx")?.f_type != DEVPTS {
        return Err(failure("/dev/pts/ptmx of the container is not on devpts"));
    }
    unlockpt(&master).context(|| "unlock terminal")?;
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let slave = ioctl_tiocgptpeer(&master, flags).context(|| "open terminal")?;
    let (columns, rows) = size;
    if columns > 0 && rows > 0 {
        let size = Winsize { ws_col: columns, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&master, size).context(|| "set terminal size")?;
    }
    // Its group stays that of `devpts`, as `tty` expects it.
    rustix::fs::fchown(&slave, Some(rustix::fs::Uid::from_raw(uid)), None).context(|| "change owner of terminal")?;
    Ok(Terminal { master, slave })
}

/// Makes the pty the controlling terminal of this process's session.
pub(super) fn make_controlling(slave: &OwnedFd) -> Step<()> {
    rustix::process::ioctl_tiocsctty(slave.as_fd()).context(|| "set controlling terminal")
}
