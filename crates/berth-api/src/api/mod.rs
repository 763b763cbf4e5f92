//! What is asked of the API server and what it says, without how: the seam between those who ask
//! and the connection.
//!
//! Who asks builds a [`Call`] and gives it to an [`ApiClient`]; bytes come back, to be parsed by
//! who knows what they are, or an [`ApiError`] that says all that a retry is decided by. The real
//! client keeps connections, identities and rates; `testing` plays one. Behaviour: spec 10.

mod call;
mod error;
mod resource;
mod typed;

use std::{
    future::poll_fn,
    task::{Context, Poll},
};

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::watch;

pub use call::{Body, Call, Line, Retries, Verb};
pub use error::{ApiError, ApiStatus, Cause};
pub use resource::Resource;
pub use typed::{Typed, parse};

/// Largest object we take, in bytes (spec 10 §8.4).
pub const OBJECT_LIMIT: usize = 8 << 20;
/// Largest list we take, in bytes (spec 10 §8.4).
pub const LIST_LIMIT: usize = 64 << 20;

/// A way to the API server.
///
/// It waits for its turn (rate), retries what spec 10 §2.6 retries, and nothing else: what else may
/// be asked twice is known by who asks. Safe to drop while waiting; the call may have been made.
#[async_trait]
pub trait ApiClient: Send + Sync + 'static {
    /// Asks once and reads the whole answer.
    ///
    /// # Errors
    /// There is no answer, or it is no success.
    async fn call(&self, call: Call) -> Result<Bytes, ApiError>;

    /// Begins to watch; each item is one event as the server wrote it (`{"type","object"}`).
    ///
    /// # Errors
    /// The watch did not begin. A connection that was lost before anything came is an empty watch.
    async fn watch(&self, call: Call) -> Result<Box<dyn WatchStream>, ApiError>;

    /// Moves when somebody could connect: what could not be asked may be asked now. Closed, where
    /// nobody tells.
    fn reached(&self) -> watch::Receiver<u64> {
        watch::channel(0).1
    }

    /// Changes when requests are made with another certificate or other authorities from now on: what was refused before
    /// may be granted. Closed, where that never happens.
    fn credentials_changed(&self) -> watch::Receiver<u64> {
        watch::channel(0).1
    }
}

/// Events of one watch.
///
/// Of most watches nothing is asked but to wait, and there are thousands: polled, they wait without
/// a future of their own.
pub trait WatchStream: Send {
    /// The next event; `None` at the end. After an error there is nothing more.
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, ApiError>>>;
}

impl dyn WatchStream {
    /// The next event; `None` at the end. After an error there is nothing more. Safe to drop
    /// while waiting.
    pub async fn next(&mut self) -> Option<Result<Bytes, ApiError>> {
        poll_fn(|context| self.poll_next(context)).await
    }
}
