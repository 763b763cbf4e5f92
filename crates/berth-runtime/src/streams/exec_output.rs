//! Output of an exec process with a drain limit: descendants may keep the pipe open forever.
//!
//! ```text
//!  before the exit ── everything
//!  until the drain limit after it ── everything; the end of the pipe ends the output
//!  then ── the current content of the pipe, and no more
//! ```
//!
//! After the reader is dropped, the pipe is drained to nowhere, so that remaining writers get no error.
//! Implements spec 09a §11 step 6.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use futures::future::BoxFuture;
use tokio::{
    io::{AsyncRead, AsyncReadExt, ReadBuf},
    net::unix::pipe,
    runtime::Handle,
    sync::watch,
};

use crate::runtime_context::RuntimeContext;

/// Maximum capacity of a pipe, bytes.
const PIPE: usize = 64 << 10;

/// Output stream of a process.
pub struct ExecOutput {
    /// `None` once the pipe has ended.
    from: Option<pipe::Receiver>,
    overdue: Option<BoxFuture<'static, ()>>,
    /// Number of bytes that may still be read after the drain limit.
    rest: usize,
    shell: Arc<RuntimeContext>,
}

impl ExecOutput {
    /// Reads a process's pipe until `limit` after its exit. `ended` becomes true, or its sender is dropped, at the
    /// exit.
    pub fn new(
        from: pipe::Receiver,
        mut ended: watch::Receiver<bool>,
        limit: Duration,
        shell: Arc<RuntimeContext>,
    ) -> Self {
        let overdue = Box::pin(async move {
            // A dropped sender counts as an exit.
            let _ = ended.wait_for(|ended| *ended).await;
            tokio::time::sleep(limit).await;
        });
        Self { from: Some(from), overdue: Some(overdue), rest: PIPE, shell }
    }
}

impl AsyncRead for ExecOutput {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.overdue.as_mut().is_some_and(|overdue| overdue.as_mut().poll(cx).is_ready()) {
            this.overdue = None;
        }
        let is_overdue = this.overdue.is_none();
        let Some(from) = this.from.as_mut().filter(|_| this.rest > 0) else { return Poll::Ready(Ok(())) };
        let room = buf.remaining().min(if is_overdue { this.rest } else { usize::MAX });
        let mut part = ReadBuf::new(buf.initialize_unfilled_to(room));
        let read = Pin::new(from).poll_read(cx, &mut part);
        let count = part.filled().len();
        if read.is_pending() && is_overdue {
            this.rest = 0; // the pipe is empty
            return Poll::Ready(Ok(()));
        }
        ready!(read)?;
        buf.advance(count);
        if count == 0 {
            this.from = None;
        }
        if is_overdue {
            this.rest = this.rest.saturating_sub(count);
        }
        Poll::Ready(Ok(()))
    }
}

impl Drop for ExecOutput {
    fn drop(&mut self) {
        let Some(mut from) = self.from.take() else { return };
        // Without a Tokio runtime, the daemon is shutting down and nothing can drain the pipe.
        if Handle::try_current().is_err() {
            return;
        }
        let stop = self.shell.stop.clone();
        let dropping = async move {
            let mut piece = vec![0; 16 << 10];
            while let Ok(1..) = from.read(&mut piece).await {}
        };
        self.shell.spawn(async move {
            tokio::select! {
                () = dropping => {}
                () = stop.cancelled() => {}
            }
        });
    }
}
