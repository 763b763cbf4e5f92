//! Bidirectional copy between a pod's TCP port and a client (spec 09a §4).

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::watch,
    time::Instant,
};

use crate::streaming::websocket::translator::idle_timeout;

/// Idle timeout of one direction after the other has ended.
const HALF_OPEN: Duration = Duration::from_secs(60);
/// Read buffer size in bytes, for an idle and for a busy connection.
const IDLE: usize = 4 << 10;
const BUSY: usize = 32 << 10;

/// I/O error of one direction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ForwardError;

/// Receiving half of a client's connection.
pub trait ClientSide {
    /// Next chunk; `None` once the client has half-closed.
    fn read(&mut self) -> impl Future<Output = Result<Option<Bytes>, ForwardError>> + Send;
}

/// Sending half of a client's connection.
pub trait ToClient {
    /// Sends bytes.
    fn write(&self, bytes: Bytes) -> impl Future<Output = Result<(), ForwardError>> + Send;

    /// Half-closes: the pod sends nothing more.
    fn finish(self) -> impl Future<Output = Result<(), ForwardError>> + Send;
}

/// Copies until both directions have ended, one has ended and the other is idle for a minute, or one fails.
pub async fn forward<R: ClientSide, W: ToClient>(pod: TcpStream, client: &mut R, to_client: W) {
    let (mut from_pod, mut to_pod) = pod.into_split();
    let active = watch::channel(Instant::now()).0;
    let is_half_open = watch::channel(false).0;
    let inward = async {
        while let Some(bytes) = client.read().await? {
            active.send_replace(Instant::now());
            to_pod.write_all(&bytes).await.map_err(|_| ForwardError)?;
        }
        to_pod.shutdown().await.map_err(|_| ForwardError)?;
        is_half_open.send_replace(true);
        Ok(())
    };
    let outward = async {
        let (mut buffer, mut size) = (BytesMut::new(), IDLE);
        loop {
            buffer.reserve(size);
            let count = from_pod.read_buf(&mut buffer).await.map_err(|_| ForwardError)?;
            if count == 0 {
                break;
            }
            size = if count >= size { BUSY } else { IDLE };
            active.send_replace(Instant::now());
            to_client.write(buffer.split().freeze()).await?;
        }
        to_client.finish().await?;
        is_half_open.send_replace(true);
        Ok::<(), ForwardError>(())
    };
    let idle = async {
        // Fails only without senders, which outlive this future.
        let _ = is_half_open.subscribe().wait_for(|is_half_open| *is_half_open).await;
        active.send_replace(Instant::now());
        idle_timeout(Some(HALF_OPEN), active.subscribe()).await;
    };
    tokio::select! {
        // The result is ignored: the caller closes the client's side in each case.
        _ = async { tokio::try_join!(inward, outward) } => {}
        () = idle => {}
    }
}
