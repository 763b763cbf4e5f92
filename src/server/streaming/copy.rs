//! Bytes both ways until either way ends (spec 04b §2.1).

use std::{io, time::Duration};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf, split},
    time::timeout,
};

/// A pipe's buffer at first, and when it is busy, in bytes.
const IDLE: usize = 4 << 10;
const BUSY: usize = 128 << 10;
/// How long saying goodbye may take.
const GOODBYE: Duration = Duration::from_secs(10);

/// Copies until one side ends, then closes both. What was read is written before.
pub async fn both_ways<A, B>(a: A, b: B)
where
    A: AsyncRead + AsyncWrite + Send,
    B: AsyncRead + AsyncWrite + Send,
{
    let (mut from_a, mut to_a) = split(a);
    let (mut from_b, mut to_b) = split(b);
    // How it ends is no news: whoever ends a stream just closes it.
    tokio::select! {
        _ = pump(&mut from_a, &mut to_b) => {}
        _ = pump(&mut from_b, &mut to_a) => {}
    }
    let goodbye = async { tokio::join!(to_a.shutdown(), to_b.shutdown()) };
    let _ = timeout(GOODBYE, goodbye).await; // the other side may be gone
}

async fn pump<R: AsyncRead, W: AsyncWrite>(from: &mut ReadHalf<R>, to: &mut WriteHalf<W>) -> io::Result<()> {
    let mut buffer = vec![0; IDLE];
    loop {
        let read = from.read(&mut buffer).await?;
        let Some(bytes) = buffer.get(..read).filter(|bytes| !bytes.is_empty()) else {
            return to.flush().await;
        };
        to.write_all(bytes).await?;
        // A TLS session keeps what it could not send at once until it is asked to.
        to.flush().await?;
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
        let copying = tokio::spawn(both_ways(ours, theirs));
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
}
