//! Authorization: Node authorizer, then grants as RBAC bindings give them. Pure.
//!
//! Implements spec 10 §6.1.

use super::{
    super::{
        refusal::Refusal,
        view::{Caller, Request, View},
    },
    graph,
};

/// Attributes of a request or review to authorize.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessAttributes {
    /// Verb: `get`.
    pub verb: String,
    /// Resource name: `pods`, `leases.coordination.k8s.io`.
    pub resource: String,
    /// Subresource; mostly empty.
    pub subresource: String,
    /// Namespace; empty at the cluster scope.
    pub namespace: String,
    /// Object name; for a list or watch, the `metadata.name` that the field selector requires.
    pub name: String,
    /// `spec.nodeName` that the field selector requires.
    pub node_selector: String,
}

impl AccessAttributes {
    /// Attributes of a request.
    pub fn of(request: &Request) -> Self {
        let selected = request.field("metadata.name").unwrap_or_default();
        Self {
            verb: request.verb.to_owned(),
            resource: request.resource.clone(),
            subresource: request.subresource.clone(),
            namespace: request.namespace.clone(),
            name: if request.name.is_empty() { selected } else { &request.name }.to_owned(),
            node_selector: request.field("spec.nodeName").unwrap_or_default().to_owned(),
        }
    }
}

/// Permission, like a role with its binding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Names of users and groups.
    pub subjects: Vec<String>,
    /// Verbs; `*` is all.
    pub verbs: Vec<String>,
    /// Resources: `pods`, `pods/status`; `*` is all.
    pub resources: Vec<String>,
    /// Object names; empty is all.
    pub names: Vec<String>,
}

impl Grant {
    /// Creates a grant for all object names.
    pub fn new(subject: &str, verbs: &[&str], resources: &[&str]) -> Self {
        let own = |list: &[&str]| list.iter().map(|item| (*item).to_owned()).collect();
        Self { subjects: own(&[subject]), verbs: own(verbs), resources: own(resources), names: Vec::new() }
    }

    fn covers(&self, caller: &Caller, asked: &AccessAttributes) -> bool {
        let resource = match asked.subresource.as_str() {
            "" => asked.resource.clone(),
            subresource => format!("{}/{subresource}", asked.resource),
        };
        let has = |list: &[String], item: &str| list.iter().any(|other| other == "*" || other == item);
        self.subjects.iter().any(|subject| *subject == caller.name || caller.is_in(subject))
            && has(&self.verbs, &asked.verb)
            && has(&self.resources, &resource)
            && (self.names.is_empty() || self.names.contains(&asked.name))
    }
}

/// Default grants of a new cluster (bootstrap tokens as kubeadm sets them up).
pub fn first_grants() -> Vec<Grant> {
    const CSRS: &str = "certificatesigningrequests.certificates.k8s.io";
    let client = format!("{CSRS}/nodeclient");
    let own = format!("{CSRS}/selfnodeclient");
    vec![
        Grant::new("system:masters", &["*"], &["*"]),
        Grant::new("system:bootstrappers", &["create", "get", "list", "watch"], &[CSRS]),
        Grant::new("system:bootstrappers", &["create"], &[&client]),
        Grant::new("system:nodes", &["create"], &[&own]),
    ]
}

/// Decides whether the caller is allowed.
///
/// # Errors
/// The authorizer's reason; often empty.
pub fn decide(view: &dyn View, caller: &Caller, asked: &AccessAttributes) -> Result<(), String> {
    if view.rules().grants.iter().any(|grant| grant.covers(caller, asked)) {
        return Ok(());
    }
    match caller.node() {
        Some(node) => of_node(view, node, asked).or_else(|why| if fixed_role(asked) { Ok(()) } else { Err(why) }),
        None => Err(String::new()),
    }
}

/// Authorizes a request.
///
/// # Errors
/// 403 with upstream's text.
pub fn authorize(view: &dyn View, request: &Request) -> Result<(), Refusal> {
    let asked = AccessAttributes::of(request);
    decide(view, &request.caller, &asked).map_err(|why| {
        let resource = match asked.subresource.as_str() {
            "" => request.plural().to_owned(),
            subresource => format!("{}/{subresource}", request.plural()),
        };
        let scope = match asked.namespace.as_str() {
            "" => "at the cluster scope".to_owned(),
            namespace => format!("in the namespace \"{namespace}\""),
        };
        let tail = if why.is_empty() { String::new() } else { format!(": {why}") };
        let (user, verb, group) = (&request.caller.name, request.verb, request.group());
        let text =
            format!("User \"{user}\" cannot {verb} resource \"{resource}\" in API group \"{group}\" {scope}{tail}");
        Refusal::forbidden(&request.resource, &asked.name, &text)
    })
}

/// Static rules that are the same for every node.
fn fixed_role(asked: &AccessAttributes) -> bool {
    let read = ["get", "list", "watch"].contains(&asked.verb.as_str());
    let create = asked.verb == "create";
    match (asked.resource.as_str(), asked.subresource.as_str()) {
        (
            "services"
            | "csidrivers.storage.k8s.io"
            | "runtimeclasses.node.k8s.io"
            | "clustertrustbundles.certificates.k8s.io",
            "",
        ) => read,
        ("certificatesigningrequests.certificates.k8s.io", "") => read || create,
        ("events" | "events.events.k8s.io", "") => create || ["update", "patch"].contains(&asked.verb.as_str()),
        (
            "tokenreviews.authentication.k8s.io"
            | "subjectaccessreviews.authorization.k8s.io"
            | "localsubjectaccessreviews.authorization.k8s.io",
            "",
        ) => create,
        ("endpoints", "") => asked.verb == "get",
        _ => false,
    }
}

fn of_node(view: &dyn View, node: &str, asked: &AccessAttributes) -> Result<(), String> {
    let refuse = |why: &str| Err(why.to_owned());
    let verb = asked.verb.as_str();
    let changes = ["get", "create", "update", "patch", "delete"].contains(&verb);
    match (asked.resource.as_str(), asked.subresource.as_str()) {
        ("secrets" | "configmaps", subresource) => match verb {
            "get" | "list" | "watch" if !subresource.is_empty() => refuse("cannot read subresource"),
            "get" | "list" | "watch" if asked.namespace.is_empty() => {
                refuse("can only read namespaced object of this type")
            }
            "get" | "list" | "watch" => related(view, node, asked),
            _ => refuse("can only read resources of this type"),
        },
        ("persistentvolumeclaims", "status") => match verb {
            "update" | "patch" => related(view, node, asked),
            _ => refuse("can only get/update/patch this type"),
        },
        (
            "persistentvolumeclaims"
            | "persistentvolumes"
            | "resourceclaims.resource.k8s.io"
            | "volumeattachments.storage.k8s.io",
            subresource,
        ) => get_only(view, node, asked, subresource),
        ("serviceaccounts", "") if verb == "get" => related(view, node, asked),
        ("serviceaccounts", subresource) => match verb {
            "create" if asked.name.is_empty() => refuse("can only create tokens for individual service accounts"),
            "create" if subresource != "token" => refuse("can only create token subresource of serviceaccount"),
            "create" => related(view, node, asked),
            _ => refuse("can only create tokens for individual service accounts"),
        },
        ("leases.coordination.k8s.io", _) => match () {
            () if !changes => refuse("can only get, create, update, patch, or delete a node lease"),
            () if asked.namespace != "kube-node-lease" => {
                refuse("can only access leases in the \"kube-node-lease\" system namespace")
            }
            () if verb != "create" && asked.name != node => {
                refuse("can only access node lease with the same name as the requesting node")
            }
            () => Ok(()),
        },
        ("csinodes.storage.k8s.io", subresource) => match () {
            () if !changes => refuse("can only get, create, update, patch, or delete a CSINode"),
            () if !subresource.is_empty() => refuse("cannot authorize CSINode subresources"),
            () if verb != "create" && asked.name != node => {
                refuse("can only access CSINode with the same name as the requesting node")
            }
            () => Ok(()),
        },
        ("resourceslices.resource.k8s.io", _) => of_slices(view, node, asked),
        ("podcertificaterequests.certificates.k8s.io", "") => match verb {
            "create" => Ok(()),
            "get" => related(view, node, asked),
            "list" | "watch" if asked.node_selector == node => Ok(()),
            _ => refuse("can only list/watch podcertificaterequests with nodeName field selector"),
        },
        ("nodes", subresource) => of_nodes(node, asked, subresource),
        ("pods", subresource) => of_pods(view, node, asked, subresource),
        _ => refuse(""),
    }
}

fn related(view: &dyn View, node: &str, asked: &AccessAttributes) -> Result<(), String> {
    if asked.name.is_empty() {
        return Err("No Object name found".to_owned());
    }
    if graph::is_related(view, node, &asked.resource, &asked.namespace, &asked.name) {
        return Ok(());
    }
    Err(format!("no relationship found between node '{node}' and this object"))
}

fn get_only(view: &dyn View, node: &str, asked: &AccessAttributes, subresource: &str) -> Result<(), String> {
    match asked.verb.as_str() {
        "get" if subresource.is_empty() => related(view, node, asked),
        "get" => Err("cannot get subresource".to_owned()),
        _ => Err("can only get individual resources of this type".to_owned()),
    }
}

fn of_slices(view: &dyn View, node: &str, asked: &AccessAttributes) -> Result<(), String> {
    match asked.verb.as_str() {
        _ if !asked.subresource.is_empty() => Err("cannot authorize ResourceSlice subresources".to_owned()),
        "create" => Ok(()),
        "get" | "update" | "patch" | "delete" => related(view, node, asked),
        _ if asked.node_selector == node => Ok(()),
        _ => Err("can only list/watch/deletecollection resourceslices with nodeName field selector".to_owned()),
    }
}

fn of_nodes(node: &str, asked: &AccessAttributes, subresource: &str) -> Result<(), String> {
    match (subresource, asked.verb.as_str()) {
        ("", "create" | "update" | "patch") | ("status", "update" | "patch") => Ok(()),
        ("", "get" | "list" | "watch") => match asked.name.as_str() {
            name if name == node => Ok(()),
            "" => Err(format!("node '{node}' cannot read all nodes, only its own Node object")),
            name => Err(format!("node '{node}' cannot read '{name}', only its own Node object")),
        },
        _ => Err(String::new()),
    }
}

fn of_pods(view: &dyn View, node: &str, asked: &AccessAttributes, subresource: &str) -> Result<(), String> {
    match (subresource, asked.verb.as_str()) {
        ("", "get") => related(view, node, asked),
        ("", "list" | "watch") if asked.node_selector == node => Ok(()),
        ("", "list" | "watch") if !asked.name.is_empty() => related(view, node, asked),
        ("", "list" | "watch") => Err("can only list/watch pods with spec.nodeName field selector".to_owned()),
        ("", "create" | "delete") | ("status", "update" | "patch") | ("eviction", "create") => Ok(()),
        _ => Err(String::new()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{
        super::tests::{FixedView, node},
        *,
    };

    fn asked(verb: &str, resource: &str, namespace: &str, name: &str) -> AccessAttributes {
        let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
        AccessAttributes {
            verb: verb.to_owned(),
            resource: resource.to_owned(),
            subresource: subresource.to_owned(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            node_selector: String::new(),
        }
    }

    /// Spec 10 §6.1, row by row.
    #[test]
    #[allow(clippy::too_many_lines, reason = "a table")]
    fn a_node_may_what_it_needs() {
        let pod = json!({"metadata": {"name": "p", "namespace": "a"}, "spec": {"nodeName": "n", "serviceAccountName": "sa",
            "volumes": [{"configMap": {"name": "m"}}, {"persistentVolumeClaim": {"claimName": "c"}}]}});
        let view = FixedView::with(&[("pods", pod)]);
        const UNRELATED: &str = "no relationship found between node 'n' and this object";
        for (verb, resource, namespace, name, expected) in [
            ("get", "configmaps", "a", "m", Ok(())),
            ("watch", "configmaps", "a", "m", Ok(())),
            ("list", "configmaps", "a", "", Err("No Object name found")),
            ("list", "configmaps", "", "m", Err("can only read namespaced object of this type")),
            ("update", "configmaps", "a", "m", Err("can only read resources of this type")),
            ("get", "secrets", "a", "m", Err(UNRELATED)),
            ("get", "persistentvolumeclaims", "a", "c", Ok(())),
            ("list", "persistentvolumeclaims", "a", "c", Err("can only get individual resources of this type")),
            ("patch", "persistentvolumeclaims/status", "a", "c", Ok(())),
            ("get", "persistentvolumeclaims/status", "a", "c", Err("can only get/update/patch this type")),
            ("create", "serviceaccounts/token", "a", "sa", Ok(())),
            ("create", "serviceaccounts/token", "a", "", Err("can only create tokens for individual service accounts")),
            ("create", "serviceaccounts/token", "a", "other", Err(UNRELATED)),
            ("get", "serviceaccounts", "a", "sa", Ok(())),
            ("get", "pods", "a", "p", Ok(())),
            ("get", "pods", "a", "gone", Err(UNRELATED)), // AC-10a-7
            ("list", "pods", "", "", Err("can only list/watch pods with spec.nodeName field selector")),
            ("delete", "pods", "a", "gone", Ok(())), // AC-10a-7
            ("patch", "pods/status", "a", "gone", Ok(())),
            ("patch", "pods", "a", "p", Err("")),
            ("patch", "pods/resize", "a", "p", Err("")),
            ("create", "nodes", "", "", Ok(())),
            ("get", "nodes", "", "n", Ok(())),
            ("watch", "nodes", "", "", Err("node 'n' cannot read all nodes, only its own Node object")),
            ("get", "nodes", "", "m", Err("node 'n' cannot read 'm', only its own Node object")),
            ("delete", "nodes", "", "n", Err("")),
            ("update", "leases.coordination.k8s.io", "kube-node-lease", "n", Ok(())),
            (
                "get",
                "leases.coordination.k8s.io",
                "kube-node-lease",
                "m",
                Err("can only access node lease with the same name as the requesting node"),
            ),
            (
                "get",
                "leases.coordination.k8s.io",
                "a",
                "n",
                Err("can only access leases in the \"kube-node-lease\" system namespace"),
            ),
            (
                "list",
                "leases.coordination.k8s.io",
                "kube-node-lease",
                "n",
                Err("can only get, create, update, patch, or delete a node lease"),
            ),
            ("delete", "csinodes.storage.k8s.io", "", "n", Ok(())),
            (
                "deletecollection",
                "resourceslices.resource.k8s.io",
                "",
                "",
                Err("can only list/watch/deletecollection resourceslices with nodeName field selector"),
            ),
            ("watch", "services", "", "", Ok(())),
            ("list", "csidrivers.storage.k8s.io", "", "", Ok(())),
            ("create", "certificatesigningrequests.certificates.k8s.io", "", "", Ok(())),
            ("patch", "events", "a", "e", Ok(())),
            ("get", "events", "a", "e", Err("")),
            ("create", "tokenreviews.authentication.k8s.io", "", "", Ok(())),
            ("create", "certificatesigningrequests.certificates.k8s.io/selfnodeclient", "", "", Ok(())),
            ("create", "certificatesigningrequests.certificates.k8s.io/nodeclient", "", "", Err("")),
            ("list", "deployments.apps", "", "", Err("")),
        ] {
            let decided = decide(&view, &node("n"), &asked(verb, resource, namespace, name));
            assert_eq!(decided, expected.map_err(str::to_owned), "{verb} {resource} {namespace}/{name}");
        }
        let own = AccessAttributes { node_selector: "n".to_owned(), ..asked("watch", "pods", "", "") };
        assert_eq!(decide(&view, &node("n"), &own), Ok(()));
        let slices = AccessAttributes {
            node_selector: "n".to_owned(),
            ..asked("deletecollection", "resourceslices.resource.k8s.io", "", "")
        };
        assert_eq!(decide(&view, &node("n"), &slices), Ok(()));
        let others = AccessAttributes { node_selector: "m".to_owned(), ..own };
        assert!(decide(&view, &node("n"), &others).is_err());
    }

    #[test]
    fn grants_extend_the_permissions_of_a_caller() {
        let mut view = FixedView::with(&[]);
        let caller = |name: &str, group: &str| Caller {
            name: name.to_owned(),
            groups: vec![group.to_owned()],
            ..Caller::default()
        };
        let create = asked("create", "certificatesigningrequests.certificates.k8s.io", "", "");
        assert_eq!(decide(&view, &caller("admin", "system:masters"), &asked("delete", "nodes", "", "n")), Ok(()));
        assert_eq!(decide(&view, &caller("system:bootstrap:a", "system:bootstrappers"), &create), Ok(()));
        assert!(decide(&view, &caller("u", "g"), &create).is_err());
        view.rules.grants.push(Grant { names: vec!["x".to_owned()], ..Grant::new("u", &["get"], &["pods/log"]) });
        assert_eq!(decide(&view, &caller("u", "g"), &asked("get", "pods/log", "a", "x")), Ok(()));
        assert!(decide(&view, &caller("u", "g"), &asked("get", "pods/log", "a", "y")).is_err());
        assert!(decide(&view, &caller("u", "g"), &asked("get", "pods", "a", "x")).is_err());
    }

    /// The full texts of spec 10 §6.1; AC-10a-7.
    #[test]
    fn a_refusal_names_the_user_and_the_forbidden_request() {
        let view = FixedView::with(&[]);
        let request = |verb, resource: &str, subresource: &str, namespace: &str, name: &str| Request {
            caller: node("n"),
            verb,
            resource: resource.to_owned(),
            subresource: subresource.to_owned(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            ..Request::default()
        };
        for (request, expected) in [
            (
                request("get", "pods", "", "ns", "p"),
                "pods \"p\" is forbidden: User \"system:node:n\" cannot get resource \"pods\" in API group \"\" in the namespace \"ns\": \
                 no relationship found between node 'n' and this object",
            ),
            (
                request("delete", "nodes", "", "", "n"),
                "nodes \"n\" is forbidden: User \"system:node:n\" cannot delete resource \"nodes\" in API group \"\" at the cluster scope",
            ),
            (
                request("list", "leases.coordination.k8s.io", "", "a", ""),
                "leases.coordination.k8s.io is forbidden: User \"system:node:n\" cannot list resource \"leases\" in API group \
                 \"coordination.k8s.io\" in the namespace \"a\": can only get, create, update, patch, or delete a node lease",
            ),
            (
                request("patch", "pods", "resize", "a", "p"),
                "pods \"p\" is forbidden: User \"system:node:n\" cannot patch resource \"pods/resize\" in API group \"\" in the namespace \"a\"",
            ),
        ] {
            let refusal = authorize(&view, &request).expect_err("forbidden");
            assert_eq!((refusal.code, refusal.message.as_str()), (403, expected));
        }
    }
}
