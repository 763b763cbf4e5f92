//! A watch that has begun: events as they come, until the server, the connection or a new identity
//! ends it.

use std::{pin::Pin, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::time::{Sleep, sleep};
use tokio_util::sync::CancellationToken;

use super::{client::PARTING, connection::chain, lines::Lines, pool::Slot};
use crate::{
    kube::api::{ApiError, WatchStream},
    metrics::Contact,
};

/// Longest event, in bytes (spec 10 §8.1).
const LONGEST: usize = 8 << 20;

/// Events of a watch.
pub struct Watching {
    body: Incoming,
    lines: Lines,
    slot: Slot,
    contact: Contact,
    /// How long after its connection is condemned it goes on.
    lingers: Duration,
    leaves: Option<Pin<Box<Sleep>>>,
    stop: CancellationToken,
    is_over: bool,
}

impl Watching {
    /// Events of a body. When the connection is to go it goes on for `lingers`, so that not all
    /// come back at once.
    pub fn new(body: Incoming, slot: Slot, contact: Contact, lingers: Duration, stop: CancellationToken) -> Self {
        Self { body, lines: Lines::default(), slot, contact, lingers, leaves: None, stop, is_over: false }
    }

    /// Something came of the body, or it is over; `None` where the connection is to go.
    async fn piece(&mut self) -> Option<Result<Option<Bytes>, hyper::Error>> {
        if self.leaves.is_none() {
            let condemned = &self.slot.connection().condemned;
            tokio::select! {
                biased;
                frame = self.body.frame() => return Some(data(frame)),
                () = condemned.cancelled() => self.leaves = Some(Box::pin(sleep(self.lingers))),
            }
        }
        let leaves = self.leaves.as_mut()?;
        tokio::select! {
            biased;
            frame = self.body.frame() => Some(data(frame)),
            () = leaves => None,
        }
    }
}

/// What is in a frame; trailers are empty, `None` is the end.
fn data(frame: Option<Result<hyper::body::Frame<Bytes>, hyper::Error>>) -> Result<Option<Bytes>, hyper::Error> {
    match frame {
        Some(frame) => frame.map(|frame| Some(frame.into_data().unwrap_or_default())),
        None => Ok(None),
    }
}

impl Watching {
    async fn line(&mut self) -> Option<Result<Bytes, ApiError>> {
        loop {
            if self.is_over {
                return None;
            }
            match self.lines.next(LONGEST) {
                Ok(Some(line)) => return Some(Ok(line)),
                Ok(None) => {}
                Err(_) => {
                    self.is_over = true;
                    let text = format!("an event is longer than {LONGEST} bytes");
                    return Some(Err(ApiError::Malformed(text)));
                }
            }
            match self.piece().await {
                Some(Ok(Some(piece))) => {
                    self.contact.heard();
                    self.lines.add(&piece);
                }
                Some(Ok(None)) => {
                    self.is_over = true;
                    self.slot.was_read();
                    if self.lines.is_cut() {
                        return Some(Err(ApiError::Lost(
                            "unexpected EOF during watch stream event decoding".to_owned(),
                        )));
                    }
                }
                Some(Err(error)) => {
                    self.is_over = true;
                    return Some(Err(ApiError::Lost(chain(&error))));
                }
                None => self.is_over = true,
            }
        }
    }
}

#[async_trait]
impl WatchStream for Watching {
    async fn next(&mut self) -> Option<Result<Bytes, ApiError>> {
        let line = self.line().await;
        if !matches!(line, Some(Ok(_))) && self.stop.is_cancelled() {
            sleep(PARTING).await;
        }
        line
    }
}

/// A watch that ended before it began.
pub struct Empty;

#[async_trait]
impl WatchStream for Empty {
    async fn next(&mut self) -> Option<Result<Bytes, ApiError>> {
        None
    }
}
