//! Resolves pod and container arguments of commands. Pure, but for the request for the pod list.

use anyhow::{Context, Result, bail};
use clap::Args;
use k8s_openapi::{List, api::core::v1::Pod};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use super::node_client::NodeClient;

/// Annotation with the default container, as read by kubectl.
const DEFAULT_CONTAINER: &str = "kubectl.kubernetes.io/default-container";
/// Maximum number of candidates listed for an ambiguous name.
const LISTED: usize = 10;

/// Characters that are not percent-encoded in a path.
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
/// Default namespace of static pods.
const DEFAULT_NAMESPACE: &str = "default";

/// Which pod.
#[derive(Args, Clone, Debug, Default)]
pub(in crate::cli) struct PodArguments {
    /// Pod name or NAMESPACE/NAME; the node name suffix of a static pod can be omitted
    pod: String,
    /// Namespace of the pod [default: any namespace that has a pod of this name]
    #[arg(short, long)]
    namespace: Option<String>,
}

/// Namespace and full name of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PodName {
    pub(super) namespace: String,
    pub(super) name: String,
}

impl PodName {
    /// Percent-encoded path segments.
    pub(super) fn path(&self) -> String {
        path(&[&self.namespace, &self.name])
    }
}

/// Percent-encodes names and joins them to a path.
pub(super) fn path(names: &[&str]) -> String {
    names.iter().map(|name| utf8_percent_encode(name, PLAIN).to_string()).collect::<Vec<_>>().join("/")
}

/// Appends the node name, as static pods carry it; `None` if no pod has a node name.
pub(super) fn with_node(named: &PodName, pods: &[Pod]) -> Option<PodName> {
    let node = pods.iter().find_map(|pod| pod.spec.as_ref()?.node_name.as_deref()).filter(|node| !node.is_empty())?;
    Some(PodName { name: format!("{}-{}", named.name, node.to_lowercase()), ..named.clone() })
}

/// Requests all pods of the node.
pub(super) async fn pods(client: &NodeClient) -> Result<Vec<Pod>> {
    Ok(client.document::<List<Pod>>("/pods").await?.items)
}

impl PodArguments {
    /// Finds the pod that the arguments name.
    pub(super) async fn find(&self, client: &NodeClient) -> Result<Pod> {
        let pods = pods(client).await?;
        let named = self.named(&pods)?;
        let is_it = |pod: &Pod| name(pod) == named.name && namespace(pod) == named.namespace;
        pods.into_iter()
            .find(is_it)
            .with_context(|| format!("pod {}/{} not found on this node", named.namespace, named.name))
    }

    /// Parses the namespace, if given, and the name.
    fn wanted(&self) -> Result<(Option<&str>, &str)> {
        match (self.pod.split_once('/'), self.namespace.as_deref()) {
            (Some((one, _)), Some(other)) if one != other => {
                bail!("{} has namespace {one:?}, but --namespace is {other:?}", self.pod)
            }
            (Some((namespace, name)), _) => Ok((Some(namespace), name)),
            (None, namespace) => Ok((namespace, self.pod.as_str())),
        }
    }

    /// The pod that the arguments may name if no listed pod matches; `None` if one or more match, or the arguments
    /// contradict each other.
    pub(super) fn unlisted(&self, pods: &[Pod]) -> Option<PodName> {
        let (namespace, wanted) = self.wanted().ok()?;
        let is_listed = pods.iter().any(|pod| name(pod) == wanted || is_short_for(wanted, pod));
        let namespace = namespace.unwrap_or(DEFAULT_NAMESPACE).to_owned();
        (!is_listed).then(|| PodName { namespace, name: wanted.to_owned() })
    }

    /// Resolves the arguments to one pod. A pod that is no longer listed is found only by namespace and full name.
    pub(super) fn named(&self, pods: &[Pod]) -> Result<PodName> {
        let (wanted_namespace, wanted) = self.wanted()?;
        let is_there = |pod: &&Pod| wanted_namespace.is_none_or(|wanted| namespace(pod) == wanted);
        let with = |is_it: &dyn Fn(&Pod) -> bool| {
            let found = pods.iter().filter(is_there).filter(|pod| is_it(pod));
            found.map(|pod| PodName { namespace: namespace(pod).to_owned(), name: name(pod).to_owned() }).collect()
        };
        let mut found: Vec<PodName> = with(&|pod| name(pod) == wanted);
        if found.is_empty() {
            found = with(&|pod| is_short_for(wanted, pod));
        }
        found.dedup();
        match (found.as_slice(), wanted_namespace) {
            ([one], _) => Ok(one.clone()),
            ([], Some(namespace)) => Ok(PodName { namespace: namespace.to_owned(), name: wanted.to_owned() }),
            ([], None) => bail!("pod {wanted:?} not found on this node"),
            (several, _) => {
                let names = several.iter().take(LISTED).map(|named| format!("{}/{}", named.namespace, named.name));
                let names: Vec<String> = names.collect();
                bail!("pod name {wanted:?} is ambiguous, it matches {} pods: {}", several.len(), names.join(", "))
            }
        }
    }
}

/// Whether `wanted` is the pod's name without the node name suffix.
fn is_short_for(wanted: &str, pod: &Pod) -> bool {
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default();
    let suffix = name(pod).strip_prefix(wanted).and_then(|rest| rest.strip_prefix('-'));
    suffix.is_some_and(|suffix| !node.is_empty() && suffix == node.to_lowercase())
}

/// Chooses the container: the named one, else the default one, else the first.
pub(super) fn container(pod: &Pod, wanted: Option<&str>) -> Result<String> {
    let spec = pod.spec.as_ref().context("the pod has no spec")?;
    let ephemeral = spec.ephemeral_containers.iter().flatten().map(|container| container.name.as_str());
    let init = spec.init_containers.iter().flatten().map(|container| container.name.as_str());
    let all: Vec<&str> =
        spec.containers.iter().map(|container| container.name.as_str()).chain(init).chain(ephemeral).collect();
    let default = pod.metadata.annotations.as_ref().and_then(|all| all.get(DEFAULT_CONTAINER)).map(String::as_str);
    let chosen = match wanted {
        Some(wanted) => all.iter().copied().find(|name| *name == wanted).with_context(|| {
            format!(
                "pod {}/{} has no container {wanted:?}, choose one of: {}",
                namespace(pod),
                name(pod),
                all.join(", ")
            )
        })?,
        None => {
            let default = default.and_then(|default| all.iter().copied().find(|name| *name == default));
            default.or(all.first().copied()).context("the pod has no container")?
        }
    };
    Ok(chosen.to_owned())
}

/// Name of the pod; empty if unset.
pub(super) fn name(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap_or_default()
}

/// Namespace of the pod; empty if unset.
pub(super) fn namespace(pod: &Pod) -> &str {
    pod.metadata.namespace.as_deref().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(namespace: &str, name: &str) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"nodeName": "Node", "containers": [{"name": "a"}, {"name": "b"}], "initContainers": [{"name": "i"}]},
        }))
        .expect("a pod")
    }

    #[test]
    fn names_may_be_short_where_they_are_clear() {
        let pods =
            [pod("default", "web-node"), pod("default", "web2-node"), pod("x", "db"), pod("y", "db"), pod("x", "db-1")];
        for (wanted, namespace, expected) in [
            ("web-node", None, Ok("default/web-node")),
            ("web", None, Ok("default/web-node")),
            ("web2", None, Ok("default/web2-node")),
            ("db", Some("x"), Ok("x/db")),
            ("y/db", None, Ok("y/db")),
            ("db", None, Err("pod name \"db\" is ambiguous, it matches 2 pods: x/db, y/db")),
            ("web2-no", None, Err("pod \"web2-no\" not found on this node")),
            ("gone", Some("x"), Ok("x/gone")),
            ("x/gone", None, Ok("x/gone")),
            ("gone", None, Err("pod \"gone\" not found on this node")),
            ("y/db", Some("y"), Ok("y/db")),
            ("y/db", Some("x"), Err("y/db has namespace \"y\", but --namespace is \"x\"")),
        ] {
            let arguments = PodArguments { pod: wanted.to_owned(), namespace: namespace.map(str::to_owned) };
            let found = arguments.named(&pods).map(|named| format!("{}/{}", named.namespace, named.name));
            assert_eq!(found.map_err(|error| error.to_string()), expected.map(str::to_owned).map_err(str::to_owned));
        }
    }

    #[test]
    fn who_is_on_no_list_may_be_ending() {
        let pods = [pod("x", "db"), pod("y", "db")];
        for (wanted, namespace, expected) in [
            ("web", None, Some("default/web default/web-node")),
            ("web", Some("x"), Some("x/web x/web-node")),
            ("db", None, None),
            ("y/web", Some("x"), None),
        ] {
            let arguments = PodArguments { pod: wanted.to_owned(), namespace: namespace.map(str::to_owned) };
            let observed = arguments.unlisted(&pods).map(|named| {
                let other = with_node(&named, &pods).map(|other| other.path()).unwrap_or_default();
                format!("{} {other}", named.path())
            });
            assert_eq!(observed.as_deref(), expected, "{wanted}");
        }
        assert_eq!(path(&["n", "a/../b?c#d%", "web-1.x_~"]), "n/a%2F..%2Fb%3Fc%23d%25/web-1.x_~");
    }

    #[test]
    fn the_default_container_is_the_annotated_one_or_the_first() {
        let mut pod = pod("n", "p");
        assert_eq!(container(&pod, None).ok().as_deref(), Some("a"));
        assert_eq!(container(&pod, Some("i")).ok().as_deref(), Some("i"));
        let error = container(&pod, Some("z")).expect_err("none").to_string();
        assert_eq!(error, "pod n/p has no container \"z\", choose one of: a, b, i");
        pod.metadata.annotations = Some([(DEFAULT_CONTAINER.to_owned(), "b".to_owned())].into());
        assert_eq!(container(&pod, None).ok().as_deref(), Some("b"));
    }
}
