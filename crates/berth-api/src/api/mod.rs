//! API client seam: request and error types, and the `ApiClient` trait, without connections.
//!
//! A caller builds a [`Call`] and passes it to an [`ApiClient`]. It receives bytes, which the caller parses, or an
//! [`ApiError`] with all that a retry decision needs. The real client owns connections, identities, and rate limiters;
//! `testing` provides a fake.
//!
//! Implements spec 10.

mod call;
mod error;
mod resource;
mod typed_client;

use std::{
    future::poll_fn,
    task::{Context, Poll},
};

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::watch;

pub use call::{Body, Call, RequestClass, Retries, Verb};
pub use error::{ApiError, ApiStatus, ApiStatusCause};
pub use resource::Resource;
pub use typed_client::{TypedClient, parse};

/// Largest object accepted, in bytes (spec 10 §8.4).
pub const OBJECT_LIMIT: usize = 8 << 20;
/// Largest list accepted, in bytes (spec 10 §8.4).
pub const LIST_LIMIT: usize = 64 << 20;

/// Client of the API server.
///
/// Waits for the rate limiter and retries what spec 10 §2.6 retries, nothing else: only the caller knows which other
/// requests are idempotent. Cancel-safe: a dropped call may still have been processed.
#[async_trait]
pub trait ApiClient: Send + Sync + 'static {
    /// Sends the request and reads the whole response body.
    ///
    /// # Errors
    /// There is no response, or its status is no success.
    async fn call(&self, call: Call) -> Result<Bytes, ApiError>;

    /// Starts a watch; each item is one event as the server wrote it (`{"type","object"}`).
    ///
    /// # Errors
    /// The watch was not established. A connection that was lost before the first event is an empty watch.
    async fn watch(&self, call: Call) -> Result<Box<dyn WatchStream>, ApiError>;

    /// Counter that changes when a connection succeeds: callers retry requests that found the server unreachable. The
    /// channel is closed for clients that do not report this.
    fn reached(&self) -> watch::Receiver<u64> {
        watch::channel(0).1
    }

    /// Changes when later requests use another certificate or other authorities: a request that was refused before may
    /// succeed now. The channel is closed for clients whose credentials never change.
    fn credentials_changed(&self) -> watch::Receiver<u64> {
        watch::channel(0).1
    }
}

/// Event stream of one watch.
///
/// Polled directly, because thousands of watches are idle most of the time: an idle one needs no future of its own.
pub trait WatchStream: Send {
    /// Polls for the next event; `None` at the end. Nothing follows an error.
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, ApiError>>>;
}

impl dyn WatchStream {
    /// Returns the next event; `None` at the end. Nothing follows an error. Cancel-safe.
    pub async fn next(&mut self) -> Option<Result<Bytes, ApiError>> {
        poll_fn(|context| self.poll_next(context)).await
    }
}
