//! `berth pods`: lists the pods of this node.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::{
    OutputFormat, in_colour,
    node_client::{self, NodeClient},
    pod_lookup::{self, namespace},
    pod_table, print,
};

/// Which pods.
#[derive(Args, Debug)]
pub(in crate::cli) struct Pods {
    /// List only pods of this namespace [default: all namespaces]
    #[arg(short, long)]
    namespace: Option<String>,
    /// List pods of all namespaces (the default)
    #[arg(short = 'A', long, conflicts_with = "namespace")]
    all_namespaces: bool,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: OutputFormat,
    #[command(flatten)]
    connection: node_client::ConnectionArguments,
}

/// Prints the pods.
pub(in crate::cli) async fn list(wanted: Pods) -> Result<ExitCode> {
    let client = NodeClient::open(&wanted.connection)?;
    let text = if wanted.output == OutputFormat::Json {
        let mut page: Value = client.document("/pods").await?;
        if let (Some(wanted), Some(items)) = (&wanted.namespace, page.get_mut("items").and_then(Value::as_array_mut)) {
            items.retain(|pod| pod.pointer("/metadata/namespace") == Some(&json!(wanted)));
        }
        format!("{}\n", serde_json::to_string_pretty(&page)?)
    } else {
        let mut pods = pod_lookup::pods(&client).await?;
        pods.retain(|pod| wanted.namespace.as_deref().is_none_or(|wanted| namespace(pod) == wanted));
        if pods.is_empty() {
            eprintln!("No resources found.");
            return Ok(ExitCode::SUCCESS);
        }
        pod_table::table(&pods, wanted.output == OutputFormat::Wide, Timestamp::now(), in_colour())
    };
    print(text)?;
    Ok(ExitCode::SUCCESS)
}
