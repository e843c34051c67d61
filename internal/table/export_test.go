package table

// MostHoles is mostHoles.
var MostHoles = &mostHoles

// BacklogList is backlogList.
var BacklogList = &backlogList
