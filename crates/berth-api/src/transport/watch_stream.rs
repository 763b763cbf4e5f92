//! Established watch: yields events until the server, the connection, or an identity change ends it.
//!
//! There are thousands of these, nearly all idle: they keep only the state that waiting needs.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http_body::Body;
use hyper::body::Incoming;
use tokio::time::{Sleep, sleep};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use super::{client::SHUTDOWN_ERROR_DELAY, connection::chain, line_splitter::Lines, pool::PoolSlot};
use crate::api::{ApiError, WatchStream};
use berth_metrics::LastContact;

/// Largest event, in bytes (spec 10 §8.1).
const LONGEST: usize = 8 << 20;

type StreamItem = Option<Result<Bytes, ApiError>>;

/// Event stream of a watch.
pub struct HttpWatchStream {
    body: Incoming,
    lines: Lines,
    slot: PoolSlot,
    contact: LastContact,
    leave: DrainTimer,
    stop: CancellationToken,
    parting: Option<Box<DelayedItem>>,
    is_over: bool,
}

/// When the watch ends before its body does.
enum DrainTimer {
    /// That long after its connection starts to drain.
    Condemned(Pin<Box<WaitForCancellationFutureOwned>>, Duration),
    /// At that time.
    At(Pin<Box<Sleep>>),
}

impl DrainTimer {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if let Self::Condemned(condemned, lingers) = self {
            ready!(condemned.as_mut().poll(context));
            *self = Self::At(Box::pin(sleep(*lingers)));
        }
        match self {
            Self::At(leaves) => leaves.as_mut().poll(context),
            Self::Condemned(..) => Poll::Pending,
        }
    }
}

/// Last item, withheld for a moment during shutdown.
struct DelayedItem {
    over: Pin<Box<Sleep>>,
    last: StreamItem,
}

impl HttpWatchStream {
    /// Returns the events of a body. When its connection starts to drain, the watch continues for `lingers`, so that
    /// reconnects are spread.
    pub fn new(
        body: Incoming,
        slot: PoolSlot,
        contact: LastContact,
        lingers: Duration,
        stop: CancellationToken,
    ) -> Self {
        let condemned = slot.connection().draining.clone().cancelled_owned();
        let leave = DrainTimer::Condemned(Box::pin(condemned), lingers);
        Self { body, lines: Lines::default(), slot, contact, leave, stop, parting: None, is_over: false }
    }

    /// Polls for a chunk of the body (trailers are empty) or its end; `None` if the watch must leave a draining
    /// connection.
    fn poll_piece(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Option<Bytes>, hyper::Error>>> {
        match Pin::new(&mut self.body).poll_frame(context) {
            Poll::Ready(Some(frame)) => {
                Poll::Ready(Some(frame.map(|frame| Some(frame.into_data().unwrap_or_default()))))
            }
            Poll::Ready(None) => Poll::Ready(Some(Ok(None))),
            Poll::Pending => self.leave.poll(context).map(|()| None),
        }
    }

    fn poll_line(&mut self, context: &mut Context<'_>) -> Poll<StreamItem> {
        loop {
            if self.is_over {
                return Poll::Ready(None);
            }
            match self.lines.next(LONGEST) {
                Ok(Some(line)) => return Poll::Ready(Some(Ok(line))),
                Ok(None) => {}
                Err(_) => {
                    self.is_over = true;
                    let text = format!("watch event exceeds {LONGEST} bytes");
                    return Poll::Ready(Some(Err(ApiError::Malformed(text))));
                }
            }
            match ready!(self.poll_piece(context)) {
                Some(Ok(Some(piece))) => {
                    self.contact.record();
                    self.lines.add(&piece);
                }
                Some(Ok(None)) => {
                    self.is_over = true;
                    self.slot.was_read();
                    if self.lines.is_cut() {
                        let text = "unexpected EOF during watch stream event decoding";
                        return Poll::Ready(Some(Err(ApiError::Lost(text.to_owned()))));
                    }
                }
                Some(Err(error)) => {
                    self.is_over = true;
                    return Poll::Ready(Some(Err(ApiError::Lost(chain(&error)))));
                }
                None => self.is_over = true,
            }
        }
    }
}

impl WatchStream for HttpWatchStream {
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<StreamItem> {
        if self.parting.is_none() {
            let line = ready!(self.poll_line(context));
            if matches!(line, Some(Ok(_))) || !self.stop.is_cancelled() {
                return Poll::Ready(line);
            }
            self.parting = Some(Box::new(DelayedItem { over: Box::pin(sleep(SHUTDOWN_ERROR_DELAY)), last: line }));
        }
        if let Some(parting) = &mut self.parting {
            ready!(parting.over.as_mut().poll(context));
        }
        Poll::Ready(self.parting.take().and_then(|parting| parting.last))
    }
}

/// Watch that was lost before its first event.
pub struct EmptyWatchStream;

impl WatchStream for EmptyWatchStream {
    fn poll_next(&mut self, _: &mut Context<'_>) -> Poll<StreamItem> {
        Poll::Ready(None)
    }
}
