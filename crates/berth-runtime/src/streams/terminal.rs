//! Terminals of exec processes (local master) and of containers (master in the shim).

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
    actor::{SHIM_ANSWER, SandboxHandle},
    errors::{RuntimeError, RuntimeResult},
};
use berth_shim::plan::{ProcessTarget, ShimRequest};
use berth_sys::polled_fd::PolledFd;

/// A terminal that can be resized.
pub enum Terminal {
    /// The runtime owns the master.
    Own(Arc<PolledFd>),
    /// The shim owns the master: the terminal of a container.
    Shim {
        /// Sandbox.
        pod: SandboxHandle,
        /// Container id.
        container: String,
    },
}

impl Terminal {
    /// Sets the terminal size.
    ///
    /// # Errors
    /// The process has ended.
    pub async fn resize(&self, columns: u16, rows: u16) -> RuntimeResult<()> {
        match self {
            Self::Own(master) => {
                let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
                tcsetwinsize(master.get_ref(), size).map_err(|e| RuntimeError::other(format!("resize terminal: {e}")))
            }
            Self::Shim { pod, container } => {
                let request = ShimRequest::Resize { of: ProcessTarget::Container(container.clone()), columns, rows };
                pod.shim()?.request(request, Vec::new(), SHIM_ANSWER).await.map(drop)
            }
        }
    }
}

/// Terminal master as a stream. Dropping the last clone hangs up the terminal.
#[derive(Clone)]
pub struct Master(Arc<PolledFd>);

impl Master {
    /// Wraps a non-blocking descriptor.
    ///
    /// # Errors
    /// The descriptor cannot be registered with the reactor.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        Ok(Self(Arc::new(PolledFd::new(fd)?)))
    }

    /// A handle for resizing.
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
                // EIO: no process has the terminal open, which is its end of file.
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
