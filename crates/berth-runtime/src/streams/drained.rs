//! What an executed process prints, until it has ended: who inherited the pipe may hold it open for ever.
//!
//! ```text
//!  before the end ── all of it
//!  up to the drain limit after it ── all of it, and the end of the pipe ends it
//!  then ── what is in the pipe at that moment, and no more
//! ```
//!
//! Once nobody wants it any more the pipe is read and dropped, so that whoever still writes is never told off.
//! Behaviour: spec 09a §11 step 6.

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

use crate::shell::Shell;

/// A pipe holds no more than that.
const PIPE: usize = 64 << 10;

/// The output of a process.
pub struct Drained {
    /// None once it has ended.
    from: Option<pipe::Receiver>,
    overdue: Option<BoxFuture<'static, ()>>,
    /// What may still be read once it is overdue.
    rest: usize,
    shell: Arc<Shell>,
}

impl Drained {
    /// Reads the pipe of a process until it has ended and `limit` has passed since. `ended` turns once, or its sender is
    /// dropped.
    pub fn new(from: pipe::Receiver, mut ended: watch::Receiver<bool>, limit: Duration, shell: Arc<Shell>) -> Self {
        let overdue = Box::pin(async move {
            // Nobody tells any more: that is an end too.
            let _ = ended.wait_for(|ended| *ended).await;
            tokio::time::sleep(limit).await;
        });
        Self { from: Some(from), overdue: Some(overdue), rest: PIPE, shell }
    }
}

impl AsyncRead for Drained {
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
            this.rest = 0; // nothing more is in the pipe
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

impl Drop for Drained {
    fn drop(&mut self) {
        let Some(mut from) = self.from.take() else { return };
        // At the very end of this process there is nobody left to read.
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
