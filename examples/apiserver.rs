//! The test API server as a standalone process, for kubectl and for an agent.
//!
//! ```text
//! cargo run --example apiserver -- --folder /tmp/cluster --node n1 --scheduler n1
//! kubectl --kubeconfig /tmp/cluster/admin.kubeconfig get nodes
//! berth --kubeconfig /tmp/cluster/n1.kubeconfig --hostname-override n1
//! ```
//!
//! The folder contains the keys, and with `--keep` the objects too, so that a restarted server has the same identity
//! and content.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context, Result};
use berth::certificates::CertificatePair;
use clap::Parser;

use berth_testkit::api_server::{ApiServer, Options, sim};

/// Standalone test API server.
#[derive(Parser)]
struct Arguments {
    /// Listen address.
    #[arg(long, default_value = "127.0.0.1:6443")]
    listen: String,
    /// Names and addresses of the serving certificate; the first is written to the kubeconfigs.
    #[arg(long)]
    name: Vec<String>,
    /// Directory to write keys and kubeconfigs to.
    #[arg(long, default_value = "/tmp/berth-apiserver")]
    folder: PathBuf,
    /// Node to write a kubeconfig with a client certificate for (`NAME.kubeconfig`); can be repeated.
    #[arg(long)]
    node: Vec<String>,
    /// Bootstrap token (`id.secret`) for `bootstrap.kubeconfig`.
    #[arg(long, default_value = "berth1.0123456789abcdef")]
    token: String,
    /// Bind unscheduled pods to this node.
    #[arg(long)]
    scheduler: Option<String>,
    /// Loopback port of the control API (`/sim/v1/…`): faults, clock, request log.
    #[arg(long)]
    sim: Option<u16>,
    /// Persist objects in `objects.json` of the directory.
    #[arg(long)]
    keep: bool,
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let folder = &arguments.folder;
    fs::create_dir_all(folder).with_context(|| format!("cannot create directory {}", folder.display()))?;
    let (certificate, key) = (folder.join("ca.crt"), folder.join("ca.key"));
    let read = || {
        Some(CertificatePair {
            certificate: fs::read_to_string(&certificate).ok()?,
            key: fs::read_to_string(&key).ok()?,
        })
    };
    let options = Options { address: arguments.listen, authority: read(), names: arguments.name, ..Options::default() };
    let server = Arc::new(ApiServer::start_with(options).await);
    fs::write(&certificate, server.authority_pem())?;
    private(&key, &server.authority.own().key)?;
    private(&folder.join("admin.kubeconfig"), &fs::read_to_string(server.kubeconfig())?)?;
    private(&folder.join("bootstrap.kubeconfig"), &fs::read_to_string(server.bootstrap_kubeconfig(&arguments.token))?)?;
    for node in &arguments.node {
        private(&folder.join(format!("{node}.kubeconfig")), &fs::read_to_string(server.node_kubeconfig(node))?)?;
    }
    server.rules(|rules| rules.scheduler = arguments.scheduler);
    let objects = folder.join("objects.json");
    if arguments.keep && objects.exists() {
        server.load(&serde_json::from_slice(&fs::read(&objects)?)?);
    }
    println!(
        "listening on {}; kubectl --kubeconfig {}/admin.kubeconfig get pods -A",
        server.address(),
        folder.display()
    );
    if let Some(port) = arguments.sim {
        println!("control API at http://{}/sim/v1/", sim::open(server.clone(), port).await);
    }
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    tokio::select! {
        ended = tokio::signal::ctrl_c() => ended?,
        _ = terminate.recv() => {}
    }
    if arguments.keep {
        private(&objects, &server.dump().to_string())?;
    }
    Ok(())
}

/// Writes a file that only its owner may read.
fn private(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(0o600))?)
}
