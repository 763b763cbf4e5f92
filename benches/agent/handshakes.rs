//! Benchmark of TLS handshakes per second and core on the agent's main port.
//!
//! The rate is computed from the agent's CPU time, because the clients share its core.

use std::{sync::Arc, time::Instant};

use anyhow::{Result, ensure};
use futures::FutureExt;
use rustls::{ClientConfig, HandshakeKind};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::{
    agent::Target,
    figures::{Bar, Figure, Samples, Unit, median},
    measurements::{BenchContext, Group, Measurement},
    private_ca::{self, Secure},
    process,
    scripted_runtime::Runtime,
};

const FIGURES: &[Figure] = &[
    median("resumed", "TLS handshakes per second and core, resumed", Unit::Count, Bar::AtLeast(2_000.0)),
    median("full", "TLS handshakes per second and core, full, with client certificate", Unit::Count, Bar::Open),
    median("wall", "TLS handshakes per second, resumed, client on the same core", Unit::Count, Bar::Open),
];
const CLIENTS: usize = 4;

/// Measurements of this module.
pub fn measurements() -> Vec<Measurement> {
    vec![Measurement {
        name: "handshakes",
        group: Group::Server,
        figures: FIGURES,
        rounds: (3, 1),
        agent: |g, t| handshakes(g, t).boxed_local(),
        raw: None,
    }]
}

async fn handshakes(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let (runtime, secure) = (Runtime::start(10_000).await?, Secure::new()?);
    let agent = runtime.secured_agent(target, &secure).await?;
    let count = ctx.options.amount(10_000, 500);
    let mut samples = Samples::default();
    for (key, resumes) in [("resumed", true), ("full", false)] {
        let clients: Vec<_> = (0..CLIENTS).map(|_| secure.client(resumes)).collect::<Result<_>>()?;
        for client in &clients {
            one(agent.secure(), client).await?; // creates a session to resume
            let resumed = one(agent.secure(), client).await? == Some(HandshakeKind::Resumed);
            ensure!(resumed == resumes, "unexpected TLS session resumption: {resumed}");
        }
        let (begun, before) = (Instant::now(), process::cpu_seconds(agent.pid())?);
        let all = clients.iter().map(|client| many(agent.secure(), client, count / CLIENTS));
        futures::future::try_join_all(all).await?;
        #[allow(clippy::cast_precision_loss, reason = "fewer than 2^52")]
        let count = count as f64;
        samples.add(key, count / (process::cpu_seconds(agent.pid())? - before));
        if resumes {
            samples.add("wall", count / begun.elapsed().as_secs_f64());
        }
    }
    Ok(samples)
}

async fn many(port: u16, client: &Arc<ClientConfig>, count: usize) -> Result<()> {
    for _ in 0..count {
        one(port, client).await?;
    }
    Ok(())
}

/// One handshake and nothing else; the session tickets arrive before the connection is closed.
async fn one(port: u16, client: &Arc<ClientConfig>) -> Result<Option<HandshakeKind>> {
    let mut stream = private_ca::connect(port, client).await?;
    let kind = stream.get_ref().1.handshake_kind();
    stream.shutdown().await?;
    let _ = stream.read(&mut [0; 1]).await; // an end without close_notify counts as well
    Ok(kind)
}
