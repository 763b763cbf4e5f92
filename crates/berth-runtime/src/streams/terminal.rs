//! Terminals: one whose master is ours, and those whose master is a shim's.

use std::{
    io,
    os::fd::OwnedFd,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use rustix::termios::{Winsize, tcsetwinsize};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::{
    actor::{Pod, SHIM_ANSWER},
    errors::{RuntimeError, RuntimeResult},
};
use berth_shim::plan::{Request, Target};
use berth_sys::watched::Watched;

/// A terminal whose size can be changed.
pub enum Terminal {
    /// Its master is ours.
    Own(Arc<Watched>),
    /// Its master is the shim's: that of a container.
    Shim {
        /// The sandbox.
        pod: Pod,
        /// The container.
        container: String,
    },
}

impl Terminal {
    /// Tells its size, in columns and rows.
    ///
    /// # Errors
    /// The process has ended.
    pub async fn resize(&self, columns: u16, rows: u16) -> RuntimeResult<()> {
        match self {
            Self::Own(master) => {
                let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
                tcsetwinsize(master.get_ref(), size).map_err(|e| RuntimeError::other(format!("resize: {e}")))
            }
            Self::Shim { pod, container } => {
                let request = Request::Resize { of: Target::Container(container.clone()), columns, rows };
                pod.shim()?.ask(request, Vec::new(), SHIM_ANSWER).await.map(drop)
            }
        }
    }
}

/// A terminal's master as a stream. When the last of its copies is dropped, who sits at the terminal is hung up on.
#[derive(Clone)]
pub struct Master(Arc<Watched>);

impl Master {
    /// Over that descriptor, which does not block.
    ///
    /// # Errors
    /// It cannot be watched.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        Ok(Self(Arc::new(Watched::new(fd)?)))
    }

    /// It, to be resized.
    pub fn terminal(&self) -> Terminal {
        Terminal::Own(self.0.clone())
    }
}

impl AsyncRead for Master {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            let mut ready = ready!(self.0.poll_read_ready(cx))?;
            let read = ready.try_io(|fd| Ok(rustix::io::read(fd.get_ref(), buf.initialize_unfilled())?));
            match read {
                Ok(Ok(count)) => {
                    buf.advance(count);
                    return Poll::Ready(Ok(()));
                }
                // Nobody sits at it any more: that is how a terminal ends.
                Ok(Err(e)) if e.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error()) => {
                    return Poll::Ready(Ok(()));
                }
                Ok(Err(e)) if e.kind() == io::ErrorKind::Interrupted => {}
                Ok(Err(e)) => return Poll::Ready(Err(e)),
                Err(_would_block) => {}
            }
        }
    }
}

impl AsyncWrite for Master {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            let mut ready = ready!(self.0.poll_write_ready(cx))?;
            match ready.try_io(|fd| Ok(rustix::io::write(fd.get_ref(), bytes)?)) {
                Ok(Err(e)) if e.kind() == io::ErrorKind::Interrupted => {}
                Ok(written) => return Poll::Ready(written),
                Err(_would_block) => {}
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
