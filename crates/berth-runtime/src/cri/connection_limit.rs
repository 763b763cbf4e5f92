//! Connection limit of the CRI socket, with eviction of idle connections.
//!
//! When the limit is reached, the connection idle for longest is closed: clients leak connections, and none of them may
//! lock out the others.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::UnixStream,
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout},
};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::server::Connected;

/// A connection without reads or writes for this long counts as idle.
const IDLE: Duration = Duration::from_secs(60);
/// Interval between searches for an idle connection while a new connection waits.
const PAUSE: Duration = Duration::from_secs(1);

/// Limits the connections of a socket.
pub(super) struct ConnectionLimiter {
    free: Arc<Semaphore>,
    taken: Mutex<Vec<Weak<Activity>>>,
    begun: Instant,
}

/// Last activity of a connection, and the token that closes it.
struct Activity {
    /// Milliseconds after [`ConnectionLimiter::begun`].
    last: AtomicU64,
    begun: Instant,
    close: CancellationToken,
}

impl ConnectionLimiter {
    /// Limits the socket to `count` connections.
    pub(super) fn new(count: usize) -> Self {
        Self { free: Arc::new(Semaphore::new(count)), taken: Mutex::default(), begun: Instant::now() }
    }

    /// Waits for a free slot and returns the connection in it.
    pub(super) async fn admit(&self, stream: UnixStream) -> LimitedConnection {
        let permit = loop {
            if let Ok(Ok(permit)) = timeout(PAUSE, self.free.clone().acquire_owned()).await {
                break permit;
            }
            self.close_idlest();
        };
        let activity =
            Arc::new(Activity { last: AtomicU64::new(0), begun: self.begun, close: CancellationToken::new() });
        activity.touch();
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.retain(|one| one.strong_count() > 0);
        taken.push(Arc::downgrade(&activity));
        let closed = Box::pin(activity.close.clone().cancelled_owned());
        LimitedConnection { stream, activity, closed, _permit: permit }
    }

    /// Closes the connection that has been idle for longest, if it counts as idle.
    fn close_idlest(&self) {
        let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let open = taken.iter().filter_map(Weak::upgrade).filter(|one| !one.close.is_cancelled());
        let idlest = open.max_by_key(|one| one.idle());
        if let Some(idlest) = idlest.filter(|one| one.idle() >= IDLE) {
            tracing::warn!(idle = ?idlest.idle(), "Too many connections to the CRI socket: closing the one idle for longest");
            idlest.close.cancel();
        }
    }
}

impl Activity {
    fn touch(&self) {
        let now = self.begun.elapsed().as_millis();
        self.last.store(u64::try_from(now).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    fn idle(&self) -> Duration {
        self.begun.elapsed().saturating_sub(Duration::from_millis(self.last.load(Ordering::Relaxed)))
    }
}

/// A connection that occupies a slot; dropping it releases the slot.
pub(super) struct LimitedConnection {
    stream: UnixStream,
    activity: Arc<Activity>,
    closed: Pin<Box<WaitForCancellationFutureOwned>>,
    _permit: OwnedSemaphorePermit,
}

impl LimitedConnection {
    /// Records activity if a read or write completed.
    fn touched<T>(&self, polled: Poll<T>) -> Poll<T> {
        if polled.is_ready() {
            self.activity.touch();
        }
        polled
    }
}

impl Connected for LimitedConnection {
    type ConnectInfo = ();
    fn connect_info(&self) {}
}

impl AsyncRead for LimitedConnection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.closed.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        let polled = Pin::new(&mut self.stream).poll_read(cx, buf);
        self.touched(polled)
    }
}

impl AsyncWrite for LimitedConnection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.touched(polled)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn only_idle_connections_are_closed_for_new_ones() {
        let places = ConnectionLimiter::new(2);
        let pair = || UnixStream::pair().expect("a pair");
        let ((leaked, _one), (busy, mut other)) = (pair(), pair());
        let (mut leaked, mut busy) = (places.admit(leaked).await, places.admit(busy).await);
        let reading = tokio::spawn(async move { leaked.read(&mut [0; 1]).await.map_err(|error| error.kind()) });
        tokio::time::advance(Duration::from_secs(59)).await;
        other.write_all(b"x").await.expect("written");
        assert_eq!(busy.read(&mut [0; 1]).await.expect("read"), 1);

        let (third, _end) = pair();
        let waited = Instant::now();
        let _third = places.admit(third).await;
        assert!(waited.elapsed() <= Duration::from_secs(3), "{:?}", waited.elapsed());
        assert_eq!(reading.await.expect("no panic"), Err(io::ErrorKind::ConnectionAborted));
        other.write_all(b"y").await.expect("it is still open");
        assert_eq!(busy.read(&mut [0; 1]).await.expect("read"), 1);
    }
}
