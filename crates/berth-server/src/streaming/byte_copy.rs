//! Bidirectional byte copy until either side ends (spec 04b §2.1).

use std::{pin::pin, time::Duration};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf, split},
    time::timeout,
};

/// Buffer size of a direction in bytes, while idle and while busy.
const IDLE: usize = 4 << 10;
const BUSY: usize = 128 << 10;
/// Time without data after which a busy direction is idle again.
const CALM: Duration = Duration::from_secs(1);
/// Timeout for the rest of the data and for the shutdown.
const GOODBYE: Duration = Duration::from_secs(10);

/// Copies until one side ends, then shuts both down. Data that was read is written first, and data that a side sent
/// before it closed is delivered: a runtime may send a command's exit status and close while the client still writes.
pub async fn copy_bidirectional<A, B>(a: A, b: B)
where
    A: AsyncRead + AsyncWrite + Send,
    B: AsyncRead + AsyncWrite + Send,
{
    let (mut from_a, mut to_a) = split(a);
    let (mut from_b, mut to_b) = split(b);
    {
        let (mut forth, mut back) = (pin!(pump(&mut from_a, &mut to_b)), pin!(pump(&mut from_b, &mut to_a)));
        tokio::select! {
            ended = &mut forth => if ended == EndedSide::Target {
                let _ = timeout(GOODBYE, back).await;
            },
            ended = &mut back => if ended == EndedSide::Target {
                let _ = timeout(GOODBYE, forth).await;
            },
        }
    }
    let goodbye = async { tokio::join!(to_a.shutdown(), to_b.shutdown()) };
    let _ = timeout(GOODBYE, goodbye).await; // the other side may be gone
}

/// Which end of a direction ended it. The error is irrelevant: the stream is closed in each case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EndedSide {
    Source,
    Target,
}

async fn pump<R: AsyncRead, W: AsyncWrite>(from: &mut ReadHalf<R>, to: &mut WriteHalf<W>) -> EndedSide {
    let mut buffer = vec![0; IDLE];
    loop {
        let read = if buffer.len() == IDLE {
            from.read(&mut buffer).await
        } else if let Ok(read) = timeout(CALM, from.read(&mut buffer)).await {
            read
        } else {
            buffer = vec![0; IDLE];
            continue;
        };
        let read = read.unwrap_or_default();
        let Some(bytes) = buffer.get(..read).filter(|bytes| !bytes.is_empty()) else { return EndedSide::Source };
        // A TLS session buffers what it could not send until it is flushed.
        if to.write_all(bytes).await.is_err() || to.flush().await.is_err() {
            return EndedSide::Target;
        }
        if read == buffer.len() && read < BUSY {
            buffer.resize(BUSY, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::duplex;

    use super::*;

    #[tokio::test]
    async fn all_bytes_arrive_and_either_end_closes_both() {
        let (mut client, ours) = duplex(64);
        let (theirs, mut runtime) = duplex(64);
        let copying = tokio::spawn(copy_bidirectional(ours, theirs));
        let sent: Vec<u8> = (0..=255).cycle().take(300_000).collect();
        let expected = sent.clone();
        let sending = tokio::spawn(async move {
            runtime.write_all(&sent).await.expect("taken");
            drop(runtime);
        });
        client.write_all(b"x").await.expect("taken");
        let mut got = Vec::new();
        client.read_to_end(&mut got).await.expect("closed in order");
        assert_eq!(got, expected);
        sending.await.expect("no panic");
        copying.await.expect("no panic");
    }

    #[tokio::test]
    async fn the_last_output_of_a_closed_peer_is_delivered() {
        // The direction that `select!` polls first is random.
        for _ in 0..50 {
            let (mut client, ours) = duplex(64);
            let (theirs, mut runtime) = duplex(64);
            client.write_all(b"too late").await.expect("taken");
            runtime.write_all(b"exit 7").await.expect("taken");
            drop(runtime);
            copy_bidirectional(ours, theirs).await;
            let mut got = String::new();
            client.read_to_string(&mut got).await.expect("closed in order");
            assert_eq!(got, "exit 7");
        }
    }
}
