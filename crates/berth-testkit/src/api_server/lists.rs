//! LIST requests: resource version semantics, pagination, and validation of list options.
//!
//! Implements spec 10a §3.

use std::{collections::VecDeque, sync::Arc};

use serde_json::{Value, json};

use super::{
    core::Core,
    resources::Kind,
    store::Filter,
    view::{Cause, Refusal, Request},
};

/// Maximum number of stored continuations; the oldest are dropped.
const RESTS: usize = 100;

/// Continuations of paginated lists.
#[derive(Debug, Default)]
pub struct Pages {
    next: u64,
    rests: VecDeque<Rest>,
}

#[derive(Debug)]
struct Rest {
    id: String,
    resource: String,
    rv: u64,
    items: Vec<Arc<Value>>,
}

impl Pages {
    fn keep(&mut self, resource: &str, rv: u64, items: Vec<Arc<Value>>) -> String {
        self.next += 1;
        let id = format!("page-{}", self.next);
        self.rests.push_back(Rest { id: id.clone(), resource: resource.to_owned(), rv, items });
        if self.rests.len() > RESTS {
            self.rests.pop_front();
        }
        id
    }

    /// Removes the continuations that a compaction makes too old.
    pub fn forget(&mut self, resource: &str, rv: u64) {
        self.rests.retain(|rest| rest.resource != resource || rest.rv > rv);
    }
}

impl Core {
    /// Returns a list, or a page of it.
    pub(super) fn page(&mut self, request: &Request, kind: &Kind) -> Result<Value, Refusal> {
        refuse_options(request, false, self.switches.watch_list)?;
        let version = version(request)?;
        let limit = request.query("limit").and_then(|limit| limit.parse().ok()).filter(|limit: &usize| *limit > 0);
        let (rv, mut items) = match request.query("continue").filter(|id| !id.is_empty()) {
            Some(id) => {
                let found = self.pages.rests.iter().find(|rest| rest.id == id && rest.resource == request.resource);
                let rest = found.ok_or_else(too_old_to_continue)?;
                (rest.rv, rest.items.clone())
            }
            None => self.matching(request, version)?,
        };
        // The watch cache ignores the limit of lists at any resource version but the current one.
        let is_paged = version.is_none() || (version == Some(0) && self.switches.pages_at_zero);
        let mut more = None;
        if let Some(limit) = limit.filter(|limit| is_paged && *limit < items.len()) {
            let rest = items.split_off(limit);
            more = Some((rest.len(), self.pages.keep(&request.resource, rv, rest)));
        }
        let mut list = envelope(kind, rv, &items);
        if let Some((count, id)) = more {
            list["metadata"]["continue"] = json!(id);
            if request.fields.is_empty() && request.labels.is_empty() {
                list["metadata"]["remainingItemCount"] = json!(count);
            }
        }
        Ok(list)
    }

    fn matching(&self, request: &Request, version: Option<u64>) -> Result<(u64, Vec<Arc<Value>>), Refusal> {
        let current = self.store.rv();
        if let Some(asked) = version.filter(|asked| *asked > current) {
            return Err(too_large(asked, current));
        }
        let is_exact = request.query("resourceVersionMatch") == Some("Exact");
        let rv = match version.filter(|_| is_exact) {
            Some(asked) if asked < self.store.floor(&request.resource) => {
                let text = format!("The resourceVersion for the provided list is too old: {asked}");
                return Err(Refusal::new(410, "Expired", text));
            }
            Some(asked) => asked,
            None => self.base(&request.resource, request.query("resourceVersion")),
        };
        let filter = filter(request);
        let mut items = self.store.list_at(&request.resource, rv);
        items.retain(|object| filter.takes(object));
        Ok((rv, items))
    }
}

/// Filter of a list, watch, or deletecollection request.
pub fn filter(request: &Request) -> Filter {
    Filter { namespace: request.namespace.clone(), fields: request.fields.clone(), labels: request.labels.clone() }
}

/// Resource version of the request; `None` if unset, which differs from 0.
///
/// # Errors
/// 422: it is not a number.
pub fn version(request: &Request) -> Result<Option<u64>, Refusal> {
    let Some(text) = request.query("resourceVersion").filter(|text| !text.is_empty()) else { return Ok(None) };
    text.parse().map(Some).map_err(|_| {
        let detail = format!("strconv.ParseUint: parsing {text:?}: invalid syntax");
        let cause = Cause::invalid("resourceVersion", &json!(text), &detail);
        Refusal::invalid("ListOptions.meta.k8s.io", "", vec![cause])
    })
}

/// 504: the resource version does not exist yet.
pub fn too_large(asked: u64, current: u64) -> Refusal {
    let message = format!("Timeout: Too large resource version: {asked}, current: {current}");
    let cause = Cause::new("ResourceVersionTooLarge", "", "Too large resource version");
    Refusal::new(504, "Timeout", message).because(cause).after(1)
}

fn too_old_to_continue() -> Refusal {
    let text = "The provided continue parameter is too old to display a consistent list result. You can start a new list \
                without the continue parameter, or use the continue token in this response to retrieve the remainder of \
                the results. Continuing with the provided token results in an inconsistent list - objects that were \
                created, modified, or deleted between the time the first chunk was returned and now may show up in the list.";
    Refusal::new(410, "Expired", text)
}

/// Validates combinations of list options.
///
/// # Errors
/// 422, with the texts of the real server.
pub fn refuse_options(request: &Request, is_watch: bool, has_watch_list: bool) -> Result<(), Refusal> {
    let text = |name: &str| request.query(name).filter(|text| !text.is_empty());
    let (matched, version) = (text("resourceVersionMatch"), text("resourceVersion"));
    let sends_initial = request.query("sendInitialEvents").is_some();
    let mut causes = Vec::new();
    let mut forbid = |field: &str, why: &str| causes.push(Cause::forbidden(field, why));
    if is_watch {
        if sends_initial && matched != Some("NotOlderThan") {
            forbid("resourceVersionMatch", "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan");
        }
        if sends_initial && !has_watch_list {
            let why = "sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled";
            forbid("sendInitialEvents", why);
        }
        if matched.is_some() && !sends_initial {
            let why = "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided";
            forbid("resourceVersionMatch", why);
        }
    } else {
        if matched.is_some() && version.is_none() {
            let why = "resourceVersionMatch is forbidden unless resourceVersion is provided";
            forbid("resourceVersionMatch", why);
        }
        if matched.is_some() && text("continue").is_some() {
            forbid("resourceVersionMatch", "resourceVersionMatch is forbidden when continue is provided");
        }
        if matched == Some("Exact") && version == Some("0") {
            let why = "resourceVersionMatch \"exact\" is forbidden for resourceVersion \"0\"";
            forbid("resourceVersionMatch", why);
        }
        if sends_initial {
            forbid("sendInitialEvents", "sendInitialEvents is forbidden for list");
        }
    }
    if let Some(other) = matched.filter(|m| !["Exact", "NotOlderThan"].contains(m)) {
        let text = format!("Unsupported value: {other:?}: supported values: \"Exact\", \"NotOlderThan\", \"\"");
        causes.push(Cause::new("FieldValueNotSupported", "resourceVersionMatch", text));
    }
    if causes.is_empty() { Ok(()) } else { Err(Refusal::invalid("ListOptions.meta.k8s.io", "", causes)) }
}

/// Encloses items in a list object; the items lose kind and apiVersion.
pub fn envelope(kind: &Kind, rv: u64, items: &[Arc<Value>]) -> Value {
    let bare = |item: &Arc<Value>| {
        let fields = item.as_object().into_iter().flatten();
        let fields = fields.filter(|(field, _)| !["kind", "apiVersion"].contains(&field.as_str()));
        Value::Object(fields.map(|(field, value)| (field.clone(), value.clone())).collect())
    };
    let items: Vec<Value> = items.iter().map(bare).collect();
    json!({"kind": format!("{}List", kind.kind), "apiVersion": kind.api_version(),
           "metadata": {"resourceVersion": rv.to_string()}, "items": items})
}
